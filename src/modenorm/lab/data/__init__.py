"""Data sets: the published files, image folders, and one that is made by code."""

from modenorm.lab.data.folder import FolderIndex, Listing, index_folder
from modenorm.lab.data.registry import NAMES, load
from modenorm.lab.data.sets import DataError, DataSet, ImageSet

__all__ = [
    "NAMES",
    "DataError",
    "DataSet",
    "FolderIndex",
    "ImageSet",
    "Listing",
    "index_folder",
    "load",
]
