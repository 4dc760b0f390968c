from collections.abc import Iterator

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests import interpreter

interpreter.speed_up()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> Iterator[None]:
    """Use one PyTorch thread, since the tensors are so small that several threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def dots_row_by_row() -> Iterator[None]:
    """Make the interpreter multiply row by row. A GPU's matrix instruction treats all rows of its tile alike, but on
    some processors, the rounding of the interpreter's matrix library depends on the number of rows.
    """

    def dot(
        self: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: object, most_imprecise: object
    ) -> TensorHandle:
        dtype = np.promote_types(a.data.dtype, d.data.dtype)
        products = a.data.astype(dtype)[:, :, None] * b.data.astype(dtype)[None, :, :]
        return TensorHandle(products.sum(1) + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield
