"""daskps: training of click-through-rate models with embedding tables far larger than memory, as a dataflow on Dask.

The folders follow the data. `data` reads examples; `hbm`, `mem` and `ssd` are the three tiers of parameters; `nn` is
the dense network; `storage` is the model directory; `wire` connects nodes; `node` is everything that lives on a worker;
`driver` runs a training run. `device` and `kernels` are the arithmetic on CPU and GPU. DESIGN.md beside this file has
the terms, and follows one batch through all parts.
"""

from daskps.api import Submission, find, submit, train
from daskps.config import Job, make_job, read_job
from daskps.driver.driver import Outcome
from daskps.errors import DaskpsError
from daskps.model import Model, evaluate, open_model
from daskps.reports import Progress
from daskps.storage.record import read_record
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
    "read_record",
    "submit",
    "train",
]
