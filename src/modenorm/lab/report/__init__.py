"""The report page and the galleries of what modes claim."""

from modenorm.lab.report.gallery import Gallery, contact_sheet, make_gallery
from modenorm.lab.report.page import Page, Picture, render, write_page
from modenorm.lab.report.records import Record, read_record, read_records
from modenorm.lab.report.tables import PaperNumber

__all__ = [
    "Gallery",
    "Page",
    "PaperNumber",
    "Picture",
    "Record",
    "contact_sheet",
    "make_gallery",
    "read_record",
    "read_records",
    "render",
    "write_page",
]
