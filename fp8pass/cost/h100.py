"""NVIDIA H100 SXM5, 80 GB: constants of the cost model.

torchao's measurements of GEMMs stand in the message of its commit dec031314 (pull request 940, October 2024): square
GEMMs by `bench_matmul.py`. Its FP8 operands are zeros, which draw less power than real data, so these rates are the upper end.
"""

from fp8pass.cost.device import Device, estimate, measured, published

_TORCHAO_GEMMS = "torchao's commit dec031314, pytorch/ao pull request 940, bench_matmul.py"
_TORCHAO_CASTS = "torchao, benchmarks/prototype/blockwise_fp8_training/README.md, 2026-03-20, kernels on an H100 80GB HBM3"

H100 = Device(
    name="NVIDIA H100",
    compute_capability=(9, 0),
    num_sms=published(132, "NVIDIA H100 Tensor Core GPU Architecture, table of the SXM5 product"),
    bf16_flops=measured(682e12, f"{_TORCHAO_GEMMS}: M = N = K = 32768; 585 to 658 TFLOP/s from 4096 to 16384"),
    fp8_flops=measured(1463e12, f"{_TORCHAO_GEMMS}: M = N = K = 32768, zero operands; 1354 to 1676 TFLOP/s from 4096 to 16384"),
    fp8_accurate_flops=measured(1421e12, f"{_TORCHAO_GEMMS}: the same; 1361 to 1395 TFLOP/s from 4096 to 16384"),
    row_wise_flops=estimate(
        0.9 * 1463e12, "pytorch/pytorch issue 147971: most shapes at 90 to 100 % of per-tensor, a tail to 50 %"
    ),
    blockwise_flops=measured(
        1234e12, "torchao, benchmarks/prototype/blockwise_fp8_training/README.md: DeepGEMM, N 2048, K 7168"
    ),
    mx_flops=None,
    memory_bandwidth=measured(2.75e12, f"{_TORCHAO_CASTS}: 2634 to 2900 GB/s of 3352"),
    transpose_bandwidth=estimate(
        0.64 * 2.75e12,
        "pytorch/pytorch issue 133242: 1.4 TB/s where the same H100 copies at 2.2; by SASS ours reach 0.55 to 0.6",
    ),
    kernel_latency=measured(2e-6, "torchao, torchao/testing/training/roofline_utils.py: a Triton kernel of one element"),
    bf16_gemm_latency=measured(4e-6, f"{_TORCHAO_GEMMS}: 256 x 256 x 256"),
    fp8_gemm_latency=measured(6e-6, f"{_TORCHAO_GEMMS}: 256 x 256 x 256, one scale per tensor"),
)
