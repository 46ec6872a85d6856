import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when the Triton kernels are imported

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill the memory of torch.empty with NaN, so that a value that is read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
