"""Reports for people: plots, tables and pages, each in one self-contained file."""

from nestling.report.page import Page
from nestling.report.plots import Line, lines

__all__ = ["Line", "Page", "lines"]
