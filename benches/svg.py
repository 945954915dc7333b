"""Bar charts as SVG, in the light and the dark mode of the reader, for `benches/plots` and `benches/peers/report`."""

from html import escape

WIDTH = 900
# The tone of a bar: for what Wharf is compared with, a second one for it, and for Wharf.
BASELINE, BASELINE_WEAK, OURS = "tuned", "default", "tuned ours"
HEADING = "value"

STYLE = """  <style>
    .name { fill: #24303f; } .value { fill: #24303f; font-weight: 600; } .note { fill: #47566a; font-size: 12.5px; }
    .tuned { fill: #8797ab; } .default { fill: #c3ccd8; } .whisker { stroke: #24303f; stroke-width: 1.2; fill: none; }
    .name.ours { font-weight: 700; } .tuned.ours { fill: #1f5fae; } .default.ours { fill: #8fb8e8; }
    @media (prefers-color-scheme: dark) {
      .name, .value { fill: #dce8f6; } .note { fill: #a9b8ca; } .tuned { fill: #77879b; } .default { fill: #3f4b5a; }
      .whisker { stroke: #dce8f6; } .tuned.ours { fill: #6aa5ea; } .default.ours { fill: #2d5a8f; }
    }
  </style>"""


def chart(title: str, height: int, lines: list[str]) -> str:
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title" '
        f'font-family="system-ui, -apple-system, \'Segoe UI\', sans-serif" font-size="14">',
        f'  <title id="title">{escape(title)}</title>',
        STYLE,
        *lines,
        "</svg>",
        "",
    ])


def text(kind: str, x: float, y: int, content: str, anchor: str = "") -> str:
    anchor = f' text-anchor="{anchor}"' if anchor else ""
    return f'  <text class="{kind}" x="{at(x)}" y="{y}"{anchor}>{escape(content)}</text>'


def bar(kind: str, x: float, y: int, width: float, height: int) -> str:
    """A bar that is at least a pixel wide, so that it can be seen."""
    return f'  <rect class="{kind}" x="{at(x)}" y="{y}" width="{max(width, 1):.1f}" height="{height}" rx="2"/>'


def key(kind: str, x: float, y: int, label: str) -> list[str]:
    """An entry of the legend; `y` is the top of its square."""
    return [
        f'  <rect class="{kind}" x="{at(x)}" y="{y}" width="12" height="12" rx="2"/>',
        text("note", x + 18, y + 10, label),
    ]


def at(place: float) -> str:
    return f"{place:.1f}" if isinstance(place, float) else str(place)


def number(value: float) -> str:
    """Rounds to hundreds from 10,000, to tens from 100: a measurement on a shared machine is no more exact."""
    if value >= 10_000:
        return f"{round(value, -2):,.0f}"
    if value >= 100:
        return f"{round(value, -1):,.0f}"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
