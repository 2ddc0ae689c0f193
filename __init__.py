"""headrace: a pretraining system whose centre is the data pipeline.

The repository root is this package. Each folder is one part of the house and has one job;
docs/design.md is its plan.
"""

__version__ = "0.1.0"
