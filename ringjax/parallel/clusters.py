"""The processes that a launcher has started, found the way jax finds them.

jax keeps its finders to itself and joins the processes in the same breath. ringjax has to know before that who there
is, to call the roll, and how many, to divide the CPU devices: the one place that uses what jax does not publish.
"""

from importlib import import_module

import jax

from ringjax.config import ProcessesConfig, UserError


class ProcessesError(UserError):
    """The processes of a run did not come together, or are not of one mind."""


def find_processes(processes: ProcessesConfig) -> ProcessesConfig:
    """The settings with count, index and coordinator as SLURM, Open MPI, Kubernetes or Cloud TPU give them.

    Raises:
      ProcessesError: none of them is there, or it does not say enough, or this version of jax has no such finders.
    """
    otherwise = "set processes.count, index and coordinator instead, or leave processes.detect out to run one process"
    try:
        detect = import_module("jax._src.clusters").ClusterEnv.auto_detect_unset_distributed_params
        found = detect(None, None, None, None, None, processes.timeout_s)[:3]
    except (ImportError, AttributeError, TypeError) as error:
        raise ProcessesError(
            f"processes.detect = true does not work with jax {jax.__version__} ({error}); {otherwise}"
        ) from error
    except Exception as error:
        raise ProcessesError(
            f"processes.detect = true, and jax cannot find them ({type(error).__name__}: {error}); {otherwise}"
        ) from error
    if None in found:
        raise ProcessesError(
            "processes.detect = true, and jax finds no processes of SLURM, Open MPI, Kubernetes or Cloud TPU; "
            + otherwise
        )
    coordinator, count, index = found
    return processes.model_copy(update={"coordinator": coordinator, "count": count, "index": index})
