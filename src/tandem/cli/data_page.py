"""The page that `tandem data check --html` writes: one file, without anything from elsewhere."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from tandem.data.examples import Rendering

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }}
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse }} th {{ white-space: nowrap }}
td, th {{ padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top }}
td.n {{ text-align: right }} .bar {{ background: #4a8f5c; height: .8rem; margin-top: .35rem }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; padding: .8rem; border: 1px solid #8886; border-radius: 6px;
  color: #777; font: 13px/1.5 ui-monospace, monospace }}
mark {{ background: #b9e6c3; color: #000; border-radius: 2px }} mark.down {{ background: #f3b6b0 }}
.broken {{ color: #c0392b }}
</style>
<h1>{name}</h1>
<table>{facts}</table>
{broken}<h2>Tokens of an example</h2>
<table>{bars}</table>
<h2>Examples</h2>
<p><mark>Trained</mark> · <mark class="down">trained away from</mark> · the rest is context.</p>
{examples}</html>
"""


def bins(lengths: Iterable[int]) -> list[tuple[int, int]]:
    """(upper limit, count) of lengths in powers of two, without gaps."""
    counts = Counter(max(length - 1, 0).bit_length() for length in lengths)
    return [(2**power, counts[power]) for power in range(min(counts, default=0), max(counts, default=-1) + 1)]


def page(
    name: str, facts: Mapping[str, object], lengths: Sequence[int], broken: Sequence[tuple[str, str]],
    shown: Sequence[tuple[str, Rendering]],
) -> str:  # fmt: skip
    """The HTML."""
    counted = bins(lengths)
    most = max((count for _, count in counted), default=1)
    listed = "".join(f"<li><b>{escape(place)}</b>: {escape(problem)}</li>" for place, problem in broken)
    return _PAGE.format(
        name=escape(name),
        facts="".join(f"<tr><th>{escape(key)}<td>{escape(str(value))}" for key, value in facts.items() if value),
        broken=f'<h2>Broken</h2><ul class="broken">{listed}</ul>\n' if broken else "",
        bars="".join(
            f'<tr><td class="n">≤ {limit}<td class="n">{count}<td>'
            f'<div class="bar" style="width:max({count / most * 24:.2f}rem, {min(count, 1)}px)"></div>'
            for limit, count in counted
        ),
        examples="\n".join(_example(place, rendering) for place, rendering in shown),
    )  # fmt: skip


def _example(place: str, rendering: Rendering) -> str:
    title = f"{place} · {' + '.join(map(str, rendering.lengths))} tokens, {rendering.trained} trained"
    texts = ("".join(_part(text, weight) for text, weight in parts) for parts in rendering.parts)
    return f"<h3>{escape(title)}</h3>" + "".join(f"<pre>{text}</pre>" for text in texts)


def _part(text: str, weight: float) -> str:
    if weight == 0:
        return escape(text)
    weighted = "" if weight == 1 else f' title="weight {weight:g}"'
    return f"<mark{' class=down' if weight < 0 else ''}{weighted}>{escape(text)}</mark>"
