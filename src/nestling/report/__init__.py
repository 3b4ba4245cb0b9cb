"""Reports that a person enjoys reading: plots, tables and pages in one self-contained file."""

from nestling.report.page import Page
from nestling.report.plots import Line, lines

__all__ = ["Line", "Page", "lines"]
