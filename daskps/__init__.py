"""daskps: click-through-rate models with embedding tables far larger than memory, trained as a dataflow on Dask.

The folders follow the data: `data` reads examples, `hbm`, `mem` and `ssd` are the three tiers of parameters, `model`
learns, `cluster` joins nodes, `flow` runs it all; `kernels` and `backend` carry the arithmetic on CPU and GPU.
"""

from daskps.config import Job, make_job, read_job
from daskps.errors import DaskpsError
from daskps.flow.progress import Outcome, Progress
from daskps.handle import Model, evaluate, open_model
from daskps.run import train
from daskps.submit import Submission, find, submit
from daskps.version import __version__

__all__ = [
    "DaskpsError",
    "Job",
    "Model",
    "Outcome",
    "Progress",
    "Submission",
    "__version__",
    "evaluate",
    "find",
    "make_job",
    "open_model",
    "read_job",
    "submit",
    "train",
]
