"""The example of docs/your-own-kernel.md."""

import shutil
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent / "docs" / "your-own-kernel.md"


def write_example(folder: Path) -> None:
    """Copies it, with the functions my_ssd and my_gdn."""
    shutil.copy(DOCUMENT.with_name("my_kernels.py"), folder)
