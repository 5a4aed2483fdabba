"""HTML pages with tables and a picture, in one file: functions from plain data to text."""

from lightning_hybrid.report.page import page, paragraph, table
from lightning_hybrid.report.timeline import Span, draw_timeline
