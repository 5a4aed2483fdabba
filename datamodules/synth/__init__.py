"""A synthetic cohort that looks like an ADNI download, with known truth."""

from .cohort import CohortSpec
from .generate import CohortSummary, generate

__all__ = ["CohortSpec", "CohortSummary", "generate"]
