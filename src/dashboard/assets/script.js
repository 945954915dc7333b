// Updates a page: on an event, it loads the page again and replaces its regions. Pages work without this script.
"use strict";
(() => {
  let source = document.body.dataset.live;
  if (!source || !window.EventSource) return;
  let events = null;
  let ended = null;
  let loading = false;
  let again = false;
  let silence = null;
  let waiting = null;
  let pause = 1000;

  const tell = (live) => {
    const state = document.querySelector("[data-live-state]");
    if (!state) return;
    state.classList.toggle("on", live);
    state.querySelector(".word").textContent = live ? "live" : "not live";
  };

  // A region in which the visitor is typing or has selected text is not replaced.
  const isBusy = (region) => {
    const active = document.activeElement;
    const selection = document.getSelection();
    return (active && active !== document.body && active.matches("input, select, textarea") && region.contains(active)) ||
      (selection && !selection.isCollapsed && region.contains(selection.anchorNode));
  };

  // Identifies a link or a button among the others of its region.
  const name = (found) => `${found.tagName} ${found.getAttribute("href") ?? found.textContent.trim().slice(0, 80)}`;

  const put = (fresh, old) => {
    if (isBusy(old) || fresh.innerHTML === old.innerHTML) return;
    const opened = [...old.querySelectorAll("details")].map((details) => details.open);
    const focused = old.contains(document.activeElement) ? name(document.activeElement) : null;
    old.replaceChildren(...fresh.childNodes);
    old.querySelectorAll("details").forEach((details, place) => { details.open = opened[place] ?? details.open; });
    if (focused === null) return;
    // The keyboard focus stays on the same element. If that is gone, it moves to the main content.
    const same = [...old.querySelectorAll("a[href], button, summary, pre")].find((found) => name(found) === focused);
    (same && !same.disabled ? same : document.getElementById("main")).focus({ preventScroll: true });
  };

  const load = async () => {
    if (loading) { again = true; return; }
    loading = true;
    try {
      const answer = await fetch(location.pathname + location.search, { headers: { accept: "text/html", "x-wharf-update": "1" } });
      // The session has ended, or the page is gone: a reload shows the login page or the error.
      if (answer.redirected || [401, 403, 404].includes(answer.status)) { location.reload(); return; }
      if (!answer.ok) later();
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const old of document.querySelectorAll("[data-region]")) {
          const fresh = page.getElementById(old.id);
          if (fresh) put(fresh, old);
        }
        source = page.body.dataset.live;
        if (source !== ended) open();
        tell(events !== null);
      }
    } catch { tell(false); later(); }
    loading = false;
    if (again) { again = false; load(); }
  };

  // The event has the counts of the menu. A list is not replaced while the visitor reads it: a notice offers a reload.
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

  // An action has ended. Its page, loaded again, has the URL of the common event stream, and `load` opens it.
  const end = (of) => { ended = of; close(); load(); };

  const close = () => { clearTimeout(silence); if (events) { events.close(); events = null; } };

  // A browser does not reopen a stream after an error response: from a proxy while the dashboard restarts, or because
  // the session has ended. Loading the page shows which it is, and opens the stream again.
  const later = () => {
    if (events || waiting || document.hidden) return;
    waiting = setTimeout(() => { waiting = null; load(); }, pause);
    pause = Math.min(pause * 2, 60000);
  };
  // A hidden tab closes its connection, because browsers allow only a few.
  const open = () => {
    if (events || document.hidden) return;
    const of = source;
    events = new EventSource(of);
    events.onopen = () => { clearTimeout(silence); pause = 1000; tell(true); };
    events.onmessage = onEvent;
    events.addEventListener("end", () => end(of));
    events.onerror = () => {
      if (events && events.readyState === EventSource.CLOSED) { close(); tell(false); later(); return; }
      // The server ends a stream every minute, and the browser opens it again at once.
      clearTimeout(silence);
      silence = setTimeout(() => tell(false), 5000);
    };
  };

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { close(); tell(false); } else { open(); onEvent(null); }
  });
  window.addEventListener("pagehide", close);
  open();
})();
