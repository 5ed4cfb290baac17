"""The report as one page of HTML that needs nothing else."""

from flsuite.publish.page.page import PageRequest, require_page, write_page

__all__ = ["PageRequest", "require_page", "write_page"]
