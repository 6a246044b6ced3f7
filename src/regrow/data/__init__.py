"""Data that can be taken up at any position: a loader with a cursor of a few integers.

``Loader`` reads a map-style dataset; ``resumable`` makes one from an existing DataLoader. Each sample is read exactly
once per epoch over all ranks, whatever dies. Nothing here knows of steps, failures or recovery.
"""

from regrow.data.loader import Loader
from regrow.data.share import Share
from regrow.data.takeover import resumable

__all__ = ["Loader", "Share", "resumable"]
