"""NVIDIA L40S and GeForce RTX 4090 (Ada, compute capability 8.9): constants of the cost model. Almost all are estimates."""

from fp8pass.cost.device import Device, estimate, published

_ADA = "NVIDIA Ada GPU Architecture white paper"
_L40S = "0.7 of the dense rate in NVIDIA's L40S data sheet: 350 W do not hold the boost clock in GEMMs"
_GEFORCE = "0.9 of the dense rate with float32 accumulation in the Ada white paper, appendix A, RTX 4090"
_TRITON = "0.6 of the per-tensor rate: cuBLASLt has no blockwise GEMM for Ada, so a Triton kernel runs"
_AS_H100 = "as on the H100 (h100.py)"

L40S = Device(
    name="NVIDIA L40S",
    compute_capability=(8, 9),
    num_sms=published(142, "NVIDIA L40S data sheet: 18,176 CUDA cores of 128 per SM"),
    bf16_flops=estimate(0.7 * 362e12, _L40S),
    fp8_flops=estimate(0.7 * 733e12, _L40S),
    fp8_accurate_flops=estimate(0.7 * 733e12, f"{_L40S}; no measurement tells the two kinds of accumulation apart on Ada"),
    row_wise_flops=estimate(0.9 * 0.7 * 733e12, "0.9 of the per-tensor rate, as on the H100 (h100.py)"),
    blockwise_flops=estimate(0.6 * 0.7 * 733e12, _TRITON),
    mx_flops=None,
    memory_bandwidth=estimate(0.9 * 864e9, "0.9 of the 864 GB/s in NVIDIA's L40S data sheet"),
    transpose_bandwidth=estimate(
        0.75 * 0.9 * 864e9, "less memory per SM than on Hopper, so issuing weighs less than there (0.6)"
    ),
    kernel_latency=estimate(2e-6, _AS_H100),
    bf16_gemm_latency=estimate(4e-6, _AS_H100),
    fp8_gemm_latency=estimate(6e-6, _AS_H100),
)

RTX_4090 = Device(
    name="NVIDIA GeForce RTX 4090",
    compute_capability=(8, 9),
    num_sms=published(128, f"{_ADA}, appendix A"),
    bf16_flops=estimate(0.9 * 165.2e12, _GEFORCE),
    fp8_flops=estimate(0.9 * 330.3e12, f"{_GEFORCE}; twice that with float16 accumulation, which cuBLASLt does not use"),
    fp8_accurate_flops=estimate(0.9 * 330.3e12, _GEFORCE),
    row_wise_flops=estimate(0.9 * 0.9 * 330.3e12, "0.9 of the per-tensor rate, as on the H100 (h100.py)"),
    blockwise_flops=estimate(0.6 * 0.9 * 330.3e12, _TRITON),
    mx_flops=None,
    memory_bandwidth=estimate(0.9 * 1008e9, f"0.9 of the 1008 GB/s in {_ADA}, appendix A"),
    transpose_bandwidth=estimate(
        0.75 * 0.9 * 1008e9, "less memory per SM than on Hopper, so issuing weighs less than there (0.6)"
    ),
    kernel_latency=estimate(2e-6, _AS_H100),
    bf16_gemm_latency=estimate(4e-6, _AS_H100),
    fp8_gemm_latency=estimate(6e-6, _AS_H100),
)
