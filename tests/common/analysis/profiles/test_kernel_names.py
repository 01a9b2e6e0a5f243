"""Short names keep what tells kernels apart, and a name gives the kind of work."""

from common.analysis.profiles.kernel_names import kind, short_name
from tests.kernel_files import SCALE

import pytest


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (SCALE, "scale<float>"),
        ("vecCopy(double*, double*, int) [clone .kd]", "vecCopy"),
        ("vecCopy(double*, double*, int) (.kd)", "vecCopy"),
        ("vecCopy.kd", "vecCopy"),
        ("triton_poi_fused_add_mul_0", "triton_poi_fused_add_mul_0"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("aten::mm", "aten::mm"),
        ("void (anonymous namespace)::softmax<float, float, 7, false>(float*, int)", "softmax<false>"),
        ("std::enable_if<!(false), void>::type internal::gemv<int, float, 32>(Params<float>)", "gemv<32>"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, float, "
         "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int, at::native::AUnaryFunctor<float>)",
         "vectorized_elementwise_kernel<AUnaryFunctor<MulFunctor<float>>, arr..."),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(at::TensorIteratorBase&)::{lambda()#1}"
         "::operator()() const::{lambda(float)#1}, std::array<char*, 2ul> >(int, std::array<char*, 2ul>)",
         "vectorized_elementwise_kernel<silu_kernel(TensorIteratorBase&)::{la..."),
        ("Cijk_" + "x" * 100, "Cijk_" + "x" * 62 + "..."),
    ],
)  # fmt: skip
def test_short_names_keep_what_tells_kernels_apart(name, short):
    assert short_name(name) == short


def test_version_3s_kernels_have_their_kinds():
    names = ("_rope_forward", "_swiglu_backward", "_rms_norm_backward", "_flash_attention_forward")
    assert [kind(name) for name in names] == ["elementwise", "elementwise", "reductions", "attention"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("rccl_main_kernel(ncclDevComm*)", "communication"),
        ("_matmul_ogs_NNT_bf16xbf16xbf16_128x256x64x1", "matrix products"),
        ("void wvSplitK_hf_<__half, 64, 2, 16, 8, 2, 1>(int, int, __half const*)", "matrix products"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long>(float*)", "copies"),
        ("void at::native::(anonymous namespace)::indexSelectSmallIndex<float, long>(float*)", "copies"),
        ("batched_transpose_32x16_half", "copies"),
        ("void rocprim::detail::onesweep_iteration_kernel<rocprim::default_config>(int*)", "reductions"),
        ("void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>(long*)", "reductions"),
        ("void at::native::(anonymous namespace)::compute_grad_weight<float, long>(long const*)", "reductions"),
        ("void at::native::(anonymous namespace)::sum_and_scatter<float, long>(long const*)", "reductions"),
    ],
)
def test_kernels_of_collectives_and_of_amds_libraries(name, expected):
    assert kind(name) == expected


def test_kernels_of_version_4():
    names = ("_matmul", "_turn", "_swiglu", "_adamw", "_cross_entropy", "_embedding_backward", "_short_attention_backward")
    expected = ["matrix products", "elementwise", "elementwise", "elementwise", "reductions", "reductions", "attention"]
    assert [kind(name) for name in names] == expected
    assert kind("_linear_cross_entropy_loss_and_gradient") == kind("_cross_entropy_mean") == "reductions"
