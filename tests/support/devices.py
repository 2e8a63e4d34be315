"""A device for tests of the cost model."""

from fp8pass.cost import Device

# Round numbers: an SM computes 1e12 FLOP/s in bfloat16.
TOY = Device(
    name="toy",
    compute_capability=(9, 0),
    num_sms=100,
    bf16_flops=100e12,
    fp8_flops=200e12,
    fp8_accurate_flops=160e12,
    row_wise_flops=180e12,
    blockwise_flops=150e12,
    mx_flops=None,
    memory_bandwidth=1e12,
    transpose_bandwidth=0.5e12,
    kernel_latency=2e-6,
    bf16_gemm_latency=4e-6,
    fp8_gemm_latency=6e-6,
)
