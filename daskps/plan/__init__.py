"""How a job would run on machines that are not there: a small calibrated model of the pipeline.

In: a workload (a paper's model, a job, a finished run's record) and hardware. Out: for every number of nodes seconds of
each stage, the bottleneck, memory and disk, examples/s and examples per cost, with every value that was fitted or
assumed. PLAN.md says how it is calculated.
"""

from daskps.plan.calibrate import calibrate
from daskps.plan.estimate import Estimate, plan
from daskps.plan.paper import PAPER_HARDWARE, paper_workload
from daskps.plan.values import Hardware, Value, Workload
from daskps.plan.work import workload_of

__all__ = [
    "PAPER_HARDWARE",
    "Estimate",
    "Hardware",
    "Value",
    "Workload",
    "calibrate",
    "paper_workload",
    "plan",
    "workload_of",
]
