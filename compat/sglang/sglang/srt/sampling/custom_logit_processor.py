"""The class that custom logit processors derive from."""

from tureen.logit_processor import CustomLogitProcessor

__all__ = ["CustomLogitProcessor"]
