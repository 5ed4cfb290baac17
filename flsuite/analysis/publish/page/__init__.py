"""The report as one self-contained HTML page."""

from flsuite.analysis.publish.page.page import PageRequest, require_page, write_page

__all__ = ["PageRequest", "require_page", "write_page"]
