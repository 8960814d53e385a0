"""A small "server" and a library with the names of fla's functions, written into a folder.

The server calls its three layers on two sequences with states in a pool: after a call of its own,
in processes that it forks or spawns, and in one that is killed.  It prints what a thread imports,
which would be half a module in a process that is forked meanwhile.
"""

from pathlib import Path
from textwrap import dedent

LIBRARY = '''
    """Stands for fla.ops.gated_delta_rule.chunk of 0.6, but returns states by default."""

    import torch

    from ssdprof.kernels import GDNInputs
    from ssdprof.kernels.gdn.reference import gdn_recurrence


    def chunk_gated_delta_rule(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=True,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs,
    ):
        """The gated delta rule."""
        out, states = gdn_recurrence(
            GDNInputs(q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial_state,
                      use_qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens),
            dtype=torch.float32,
        )
        if kwargs.get("fault") == "overwrites":
            v.zero_()
        if kwargs.get("fault") == "row":
            states = states[:1]
        if kwargs.get("fault") == "nan":
            out[0, 4, 1, 3] = float("nan")
        if kwargs.get("fault") == "transposed":
            states = states.mT
        return out.to(v.dtype), states if output_final_state else None


    chunk_gated_delta_rule.attribute = "kept"
'''

SERVER = """
    import glob, hashlib, multiprocessing, os, signal, sys, threading, time

    import torch
    from torch.nn.functional import normalize
    from fla.ops import gated_delta_rule

    FAULT = sys.argv[1]


    class Mixer(torch.nn.Module):
        def __init__(self, index):
            super().__init__()
            self.prefix = f"model.layers.{index}.linear_attn"
            self.pool = torch.zeros(4, 2, 16, 16)

        def forward(self, number):
            tokens, slots = 6 + number % 3, torch.tensor([3, 2])
            q, k = (torch.randn(1, tokens, 1, 16) for _ in range(2))
            v, g = torch.randn(1, tokens, 2, 16), -torch.rand(1, tokens, 2)
            is_faulty = number == 10 and self.prefix == "model.layers.10.linear_attn"
            out, states = gated_delta_rule.chunk_gated_delta_rule(
                q, normalize(k, dim=-1), v, g, torch.rand(1, tokens, 2),
                initial_state=self.pool[slots],
                cu_seqlens=torch.tensor([0, 3, tokens]), fault=is_faulty and FAULT,
            )
            self.pool[slots] = states
            states.zero_()
            if is_faulty and FAULT == "padding":  # of a row with slot -1
                self.pool[-1] = torch.randn(2, 16, 16)
            return out


    def work(rank, passes):
        os.environ["RANK"] = str(rank)
        torch.manual_seed(rank)
        layers, digest = [Mixer(index) for index in (2, 9, 10)], hashlib.sha256()
        with torch.inference_mode():
            for number in range(passes):
                for layer in layers:
                    digest.update(layer(number).nan_to_num().numpy().tobytes())
        print(rank, digest.hexdigest(), flush=True)


    class NoImports:
        def find_spec(self, name, *_):
            if threading.current_thread() is not threading.main_thread():
                print("a thread imports", name, flush=True)


    if __name__ == "__main__":
        sys.meta_path.insert(0, NoImports())
        print(sys.stdin.read(), flush=True)
        work(0, 1)
        for rank, kind in enumerate(sys.argv[2:], 1):
            worker = multiprocessing.get_context(kind).Process(target=work, args=(rank, 12))
            worker.start()
            worker.join()
        if not os.fork():
            work(3, 2)
            calls = f"out/calls/rank3-{os.getpid()}_*.safetensors"
            while FAULT == "no" and len(glob.glob(calls)) < 6:  # a thread stores them
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        os.wait()
        sys.exit(7)
"""


def write(folder: Path) -> Path:
    """The library and the server in a folder.  Returns the server's file."""
    package = folder / "fla" / "ops" / "gated_delta_rule"
    package.mkdir(parents=True)
    (package / "chunk.py").write_text(dedent(LIBRARY))
    (package / "__init__.py").write_text("from .chunk import chunk_gated_delta_rule\n")
    metadata = folder / "flash_linear_attention-0.6.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: flash-linear-attention\nVersion: 0.6.0\n")
    server = folder / "server.py"
    server.write_text(dedent(SERVER))
    return server
