"""Predictions of how a job would run on hardware that is not available: a small calibrated model of the pipeline.

In: a workload (a model of the paper, a job, or the record of a finished run) and hardware. Out: for each number of
nodes, the seconds of each stage, the bottleneck, memory and disk, examples/s and examples per cost; and every value
that was fitted or assumed. PLAN.md has the formulas.
"""

from daskps.plan.estimate import Estimate, Hardware, Value, Workload, plan
from daskps.plan.paper import PAPER_HARDWARE, paper_workload
from daskps.plan.workload import calibrate, memory_terms, workload_of

__all__ = [
    "PAPER_HARDWARE",
    "Estimate",
    "Hardware",
    "Value",
    "Workload",
    "calibrate",
    "memory_terms",
    "paper_workload",
    "plan",
    "workload_of",
]
