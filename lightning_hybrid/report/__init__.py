"""HTML pages with tables and a picture, in one file: functions from plain data to text."""

from lightning_hybrid.report.page import Span, page, paragraph, table, timeline
