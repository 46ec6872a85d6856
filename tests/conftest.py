import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests run in as many processes as there are cores; more threads than cores would wait for each other.
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, also by the commands that tests start

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when the Triton kernels are imported

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill the memory of torch.empty with NaN, so that a value that is read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
