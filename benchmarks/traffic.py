"""Bytes and kernels besides GEMMs of a Llama block's training step, in Inductor's code for an H200. Runs on any CPU."""

from __future__ import annotations

from benchmarks.common import Result, main, require
from benchmarks.peers import contestants
from tests.support.traffic import elementwise_kernels, megabytes, traffic_of


def run(quick: bool) -> Result:
    """`quick` leaves other projects out."""
    rows, checks, notes = [], [], []
    for name, compile_model in contestants(("delayed", "current", "blockwise", "rowwise")).items():
        if quick and name.startswith("torchao"):
            continue
        try:
            reports = traffic_of(compile_model)
        except Exception as error:
            if not name.startswith("torchao"):
                raise
            notes.append(f"{name} failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        gemms = sum(k.is_gemm for r in reports for k in r.kernels)
        require(gemms >= 21, f"{name}: {gemms} GEMMs and attention kernels in both graphs", checks)
        rows.append({"what": name, "MB": megabytes(reports), "kernels": len(elementwise_kernels(reports)), "GEMMs": gemms})
    for row in rows:
        row["MB / bf16"] = row["MB"] / rows[0]["MB"]
    return Result(rows, "bf16", checks, notes)


if __name__ == "__main__":
    main("traffic", run)
