"""NVIDIA B200 SXM: constants of the cost model."""

from fp8pass.cost.device import Device, estimate, measured

_MAMF = "S. Bekman, ml-engineering, insights/when-to-upgrade-gpus: highest matmul rate found, B200 SXM"
_AS_H100 = "as on the H100 (h100.py)"

B200 = Device(
    name="NVIDIA B200",
    compute_capability=(10, 0),
    num_sms=estimate(148, "what CUDA reports for a B200 by common accounts; NVIDIA's data sheet does not say"),
    bf16_flops=measured(1745e12, _MAMF),
    fp8_flops=measured(3432.5e12, _MAMF),
    fp8_accurate_flops=estimate(
        3432.5e12, "Blackwell's tensor cores accumulate FP8 in float32, so both choices run the same instruction"
    ),
    row_wise_flops=estimate(0.9 * 3432.5e12, "0.9 of the per-tensor rate, as on the H100 (h100.py)"),
    blockwise_flops=estimate(
        0.8 * 3432.5e12, "0.8 of the per-tensor rate: the H100's ratio is 0.84 (h100.py), and the kernels are younger"
    ),
    mx_flops=estimate(0.9 * 3432.5e12, "MXFP8's scales are applied by the tensor cores; 0.9 for loading and arranging them"),
    memory_bandwidth=estimate(
        0.9 * 7.672e12, "0.9 of 7680 bits x 3996 MHz x 2, from torchao/testing/training/roofline_utils.py"
    ),
    transpose_bandwidth=estimate(
        0.5 * 7.672e12, "issuing does not grow with the memory: less of its bandwidth than on the H200 (0.54)"
    ),
    kernel_latency=estimate(2e-6, _AS_H100),
    bf16_gemm_latency=estimate(4e-6, _AS_H100),
    fp8_gemm_latency=estimate(6e-6, _AS_H100),
)
