"""Pairs as pictures and as one self-contained page of HTML; nothing is loaded from elsewhere.

What is shown is `pairs`' part, where it is written `cli`'s.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from edge_runtime.preview.pairs import Pair, Pixels, Settings, figures, remarks

YOURS, THEIRS = "your image", "what an attacker gets with these settings"
LEAST_PX = 300  # of a panel's width, so that its title fits
GAP_PX, TITLE_PX = 12, 28
_STYLE = """
:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
padding: 0 1rem; } h1 { font-size: 1.5rem; } figure { margin: 2rem 0; } img { max-width: 100%; height: auto; }
figcaption, li { opacity: .9; }
"""


def to_png(pair: Pair) -> bytes:
    """Both pictures side by side, enlarged, each under its title."""
    panels = [_enlarged(pixels) for pixels in (pair.yours, pair.theirs)]
    width, height = panels[0].width, panels[0].height
    sheet = Image.new("RGB", (2 * width + 3 * GAP_PX, height + TITLE_PX + GAP_PX), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for place, (panel, title) in enumerate(zip(panels, (YOURS, THEIRS), strict=True)):
        left = GAP_PX + place * (width + GAP_PX)
        sheet.paste(panel, (left, TITLE_PX))
        draw.text((left, 7), title, "black", font)
    data = io.BytesIO()
    sheet.save(data, "PNG")
    return data.getvalue()


def _enlarged(pixels: Pixels) -> Image.Image:
    times = max(1, -(-LEAST_PX // pixels.shape[1]))
    return Image.fromarray(np.repeat(np.repeat(pixels, times, axis=0), times, axis=1))


def to_html(pairs: Sequence[tuple[Pair, bytes]], settings: Settings, package: str) -> str:
    """The whole page, with the pictures (PNG) in it."""
    shown = "".join(
        f"<figure><h2>{html.escape(pair.name)}</h2>"
        f'<img alt="{YOURS}, and {THEIRS}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{'<br>'.join(map(html.escape, figures(pair)))}</figcaption></figure>"
        for pair, png in pairs
    )
    notes = "".join(f"<li>{html.escape(line)}</li>" for line in remarks(settings))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>What an attacker gets</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><h1>What an attacker gets of your images</h1><p>{html.escape(package)}</p>"
        f"<ul>{notes}</ul>{shown}</html>\n"
    )
