"""Mode Normalization (Deecke, Murray & Bilen, ICLR 2019) for PyTorch."""

__version__ = "0.1.0"
