import pytest


def pytest_configure(config: pytest.Config) -> None:
    # numpy's, about every loop over a tensor in Triton's interpreter
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array:DeprecationWarning:triton")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`-m gpu` on a machine without a GPU skips and says why."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
