"""NVIDIA H200 SXM: constants of the cost model. The H100's die, faster memory; what fp8pass is designed for."""

from fp8pass.cost.device import Device, estimate, measured, published

_MAMF = "S. Bekman, ml-engineering, insights/when-to-upgrade-gpus: highest matmul rate found, H200 SXM"
_AS_H100 = "as on the H100, whose die this is (h100.py)"

H200 = Device(
    name="NVIDIA H200",
    compute_capability=(9, 0),
    num_sms=published(132, "NVIDIA H100 Tensor Core GPU Architecture, table of the SXM5 product; the H200 is the same die"),
    bf16_flops=measured(794.5e12, _MAMF),
    fp8_flops=measured(1453.4e12, _MAMF),
    fp8_accurate_flops=estimate(0.97 * 1453.4e12, "0.97 of the rate with fast accumulation, the H100's ratio (h100.py)"),
    row_wise_flops=estimate(0.9 * 1453.4e12, "0.9 of the per-tensor rate (pytorch/pytorch issue 147971, on an H100)"),
    blockwise_flops=estimate(1234e12, _AS_H100),
    mx_flops=None,
    memory_bandwidth=estimate(
        4.3e12, "0.9 of the published 4.8 TB/s; kernels on Hopper reach 0.82 to 0.92 of theirs (h100.py)"
    ),
    transpose_bandwidth=estimate(
        0.6 * 4.3e12, "SASS of our cast-transpose kernels (registers, issue rate): 55 to 60 % of copying"
    ),
    kernel_latency=estimate(2e-6, _AS_H100),
    bf16_gemm_latency=estimate(4e-6, _AS_H100),
    fp8_gemm_latency=estimate(6e-6, _AS_H100),
)
