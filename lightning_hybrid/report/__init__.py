"""Pictures of plans, as one HTML page that needs nothing but itself. Plain data in, text out."""

from lightning_hybrid.report.bars import Bar, draw_bars
from lightning_hybrid.report.curves import draw_curves
from lightning_hybrid.report.page import page, paragraph, table
from lightning_hybrid.report.strip import Piece, draw_strip
from lightning_hybrid.report.timeline import Span, draw_timeline

__all__ = [
    "Bar",
    "Piece",
    "Span",
    "draw_bars",
    "draw_curves",
    "draw_strip",
    "draw_timeline",
    "page",
    "paragraph",
    "table",
]
