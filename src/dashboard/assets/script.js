// Keeps a page up to date: hears that there is something new, loads the page again and puts its regions in place. Pages work without it.
"use strict";
(() => {
  const source = document.body.dataset.live;
  if (!source || !window.EventSource) return;
  let events = null;
  let ended = false;
  let loading = false;
  let again = false;

  const tell = (live) => {
    const state = document.querySelector("[data-live-state]");
    if (!state) return;
    state.classList.toggle("on", live);
    state.querySelector(".word").textContent = live ? "live" : "not live";
  };

  // A region in which somebody is typing, or has marked text, stays as it is.
  const isBusy = (region) => {
    const active = document.activeElement;
    const selection = document.getSelection();
    return (active && active !== document.body && active.matches("input, select, textarea") && region.contains(active)) ||
      (selection && !selection.isCollapsed && region.contains(selection.anchorNode));
  };

  const put = (fresh, old) => {
    if (isBusy(old) || fresh.innerHTML === old.innerHTML) return;
    const opened = [...old.querySelectorAll("details")].map((details) => details.open);
    const focused = old.contains(document.activeElement) && document.activeElement.getAttribute("href");
    old.replaceChildren(...fresh.childNodes);
    old.querySelectorAll("details").forEach((details, place) => { details.open = opened[place] ?? details.open; });
    if (focused) {
      const link = [...old.querySelectorAll("a[href]")].find((link) => link.getAttribute("href") === focused);
      if (link) link.focus({ preventScroll: true });
    }
  };

  const load = async () => {
    if (loading) { again = true; return; }
    loading = true;
    try {
      const answer = await fetch(location.pathname + location.search, { headers: { accept: "text/html" } });
      if (answer.ok && !answer.redirected) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const old of document.querySelectorAll("[data-region]")) {
          const fresh = page.getElementById(old.id);
          if (fresh) put(fresh, old);
        }
        tell(events !== null);
      }
    } catch { tell(false); }
    loading = false;
    if (again) { again = false; load(); }
  };

  // What the menu counts comes with the event. A list does not move under somebody's hand: it says that there is something new.
  let before = null;
  const count = (data) => {
    tell(true);
    const changed = document.getElementById("changed");
    if (changed && before !== null && before !== data) changed.hidden = false;
    before = data;
    for (const [path, number] of Object.entries(JSON.parse(data))) {
      const link = document.querySelector(`#menu a[href$="${path}"]`);
      if (!link) continue;
      const badge = link.querySelector(".badge");
      if (badge) badge.remove();
      if (number) {
        const fresh = document.createElement("span");
        fresh.className = "badge";
        fresh.textContent = number;
        link.append(" ", fresh);
      }
    }
  };

  const isLive = () => document.querySelector("[data-live-load]") !== null;
  const onEvent = (event) => { if (isLive()) load(); else if (event && event.data.startsWith("{")) count(event.data); };

  const close = () => { if (events) { events.close(); events = null; } };
  // A tab that nobody sees holds no connection: browsers allow few of them.
  const open = () => {
    if (events || ended || document.hidden) return;
    events = new EventSource(source);
    events.onopen = () => tell(true);
    events.onmessage = onEvent;
    events.addEventListener("end", () => { ended = true; close(); load(); });
    events.onerror = () => tell(false);
  };

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { close(); tell(false); } else { open(); onEvent(null); }
  });
  window.addEventListener("pagehide", close);
  open();
})();
