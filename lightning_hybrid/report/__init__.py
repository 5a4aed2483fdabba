"""HTML pages with tables and pictures, in one file: functions from plain data to text."""

from lightning_hybrid.report.page import page, paragraph, table
from lightning_hybrid.report.pictures import Bar, Span, draw_bars, draw_timeline

__all__ = [
    "Bar",
    "Span",
    "draw_bars",
    "draw_timeline",
    "page",
    "paragraph",
    "table",
]
