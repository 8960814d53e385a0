"""The example of docs/your-own-kernel.md."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent / "docs" / "your-own-kernel.md"


def write_example(folder: Path) -> None:
    """Writes it as my_kernels.py, with the functions my_ssd and my_gdn."""
    example = re.search(r"<!-- example: my_kernels\.py -->\n```python\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
    assert example is not None
    (folder / "my_kernels.py").write_text(example[1])
