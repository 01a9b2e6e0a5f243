"""Short names keep what tells kernels apart, and a name gives the kind of work."""

from tests.kernel_files import SCALE
from tracepage.readers.kernel_names import kind, short_name, unknown

import pytest


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (SCALE, "scale<float>"),
        ("vecCopy(double*, double*, int) [clone .kd]", "vecCopy"),
        ("aten::mm", "aten::mm"),
        (
            "void (anonymous namespace)::softmax<float, float, 7, false>(float*, int)",
            "softmax<false>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, float, "
            "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int, at::native::AUnaryFunctor<float>)",
            "vectorized_elementwise_kernel<AUnaryFunctor<MulFunctor<float>>, arr...",
        ),
        ("Cijk_" + "x" * 100, "Cijk_" + "x" * 62 + "..."),
    ],
)
def test_short_names_keep_what_tells_kernels_apart(name, short):
    assert short_name(name) == short


NAMES = {
    "matrix products": (
        "_matmul",
        "_matmul_ogs_NNT_bf16xbf16xbf16_128x256x64x1",
        "void wvSplitK_hf_<__half, 64, 2, 16, 8, 2, 1>(int, int, __half const*)",
        "aten::mm",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_64x128_8x5_nt_align1>(cutlass_80_simt_sgemm_64x128_8x5_nt_align1::Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>)",
        "Cijk_Ailk_Bjlk_SB_Bias_AS_SAV_UserArgs_MT64x16x16_MI16x16x1_SN",
        "triton_tem_fused_mm_3",
        "void fbgemm_gpu::f8f8bf16_rowwise_gemm<1>(int)",
        "aclnnMm_MatMulV3_MatMulV3",
        "std::enable_if<!T7, void>::type internal::gemvx::kernel<int, int, float, false>(cublasGemvParamsEx<int>)",
        "bmm_E4m3_E4m3E4m3_Fp32_t128x128x128u2_s3_et64x64_m64x64x32_sm100f",
    ),
    "convolutions": (
        "ampere_scudnn_128x64_relu_interior_nn_v1",
        "miopenSp3AsmConv_v30_3_1_gfx9_fp16_dot2_edc_stride2",
        "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32",
        "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc",
        "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int, int, int, float const*)",
        "_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_28GridwiseGemm_xdl",
        "void cutlass::Kernel2<cutlass_tensorop_s1688fprop_optimized_tf32_128x128_16x4_nhwc_align4>(Params)",
    ),
    "attention": (
        "_flash_attention_forward",
        "_short_attention_backward",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm80>::Params)",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<32, 128, 128, 4>>(pytorch_flash::Flash_fwd_params)",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "attn_fwd",
        "bwd_kernel_dk_dv",
        "bwd_preprocess",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3",
        "void ck_tile::kentry<ck_tile::FmhaFwdKernel<float>>(ck_tile::FmhaFwdKernel<float>::Kargs)",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)",
        "void cudnn::fusion::convert_dq_to_16bits<true>(void const*)",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>(Params)",
        "void sage_fwd_kernel<64, 128>(__nv_bfloat16*)",
        "mla_decode_stage1_asm",
        "void kernel_mha<__nv_bfloat16, 128>(Params)",
    ),
    "reductions": (
        "_rms_norm_backward",
        "_cross_entropy",
        "_embedding_backward",
        "_linear_cross_entropy_loss_and_gradient",
        "_cross_entropy_mean",
        "void rocprim::detail::onesweep_iteration_kernel<rocprim::default_config>(int*)",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>(long*)",
        "void at::native::(anonymous namespace)::compute_grad_weight<float, long>(long const*)",
        "void at::native::(anonymous namespace)::sum_and_scatter<float, long>(long const*)",
        "aten::sum",
        "aten::_softmax",
        "aten::nll_loss_forward",
        "aten::linalg_vector_norm",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, false>(float*, float const*, int)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>, unsigned int>>()",
        "triton_per_fused__softmax_mul_2",
        "triton_red_fused_mean_pow_0",
        "MIOpenBatchNormFwdTrainSpatial",
    ),
    "elementwise": (
        "_rope_forward",
        "_swiglu_backward",
        "_rotate",
        "_swiglu",
        "_adamw",
        "_quantize",
        "aten::add_",
        "aten::_foreach_addcmul_",
        "aten::silu_backward",
        "aten::_fused_adamw_",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3> >()",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, std::plus<float> >(float)",
        "triton_poi_fused__scaled_dot_product_flash_attention_cat_mul_5",
        "SubTensorOpWithScalar1d",
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)",
        "void vllm::act_and_mul_kernel<float>(float*)",
        "void at::native::vectorized_elementwise_kernel<4, fbgemm_gpu::clip<float>, std::array<char*, 2ul> >(int)",
    ),
    "copies": (
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long>(float*)",
        "void at::native::(anonymous namespace)::indexSelectSmallIndex<float, long>(float*)",
        "batched_transpose_32x16_half",
        "aten::copy_",
        "aten::index",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "__amd_rocclr_copyBuffer",
        "__amd_rocclr_fillBufferAligned",
        "void at::native::elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<4u>, unsigned int, 4, 64, 64>(OpaqueType<4u>*)",
        "void fbgemm_gpu::permute_2D_sparse_data_kernel<true, long, float>(int, int)",
        "fbgemm::permute_2D_sparse_data",
        "fbgemm_gpu::dense_to_jagged_kernel",
        "fbgemm::jagged_to_padded_dense",
        "_ZN10fbgemm_gpu24block_bucketize_sparse_features_kernelE",
        "fbgemm_gpu::split_embedding_codegen_forward_unweighted_kernel",
        "void fbgemm_gpu::split_embedding_codegen_forward_unweighted_kernel<float, float>(float const*)",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>(__nv_bfloat16 const*)",
    ),
    "communication": (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "rccl_main_kernel(ncclDevComm*)",
        "record_param_comms",
        "c10d::allreduce_",
        "gloo:all_reduce",
        "reduce_scatter_kernel",
        "all_gather_kernel",
        "void c10d::symmetric_memory::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
        "void one_shot_all_reduce_kernel<float>(float*)",
        "void two_shot_all_reduce_kernel_inplace<float>(float*)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
        "nvshmemi_transfer_rma_block",
        "void trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<bf16>(Params)",
    ),
    "other": (
        "CompiledFunction",
        "fbgemm::asynchronous_complete_cumsum",
        "fbgemm_gpu::bounds_check_indices_kernel",
        "void splitKernel<float>(float*)",
        "aten::embedding_dense_backward",
        "aten::normal_",
        "add",
        "void my<cutlass::half>(ncclComm*)",
    ),
}


@pytest.mark.parametrize("expected", NAMES)
def test_kinds_of_names(expected):
    assert {name: kind(name) for name in NAMES[expected]} == dict.fromkeys(
        NAMES[expected], expected
    )


def test_kernels_of_no_known_kind_are_named_if_they_take_long():
    times = {
        "nvjet_tst": 60.0,
        **{f"void mine::kernel_{i}<float>(float*)": 10.0 + i for i in range(6)},
    }
    assert unknown(times) == "56 % of the time, most of it in " + ", ".join(
        f"kernel_{i}<float>" for i in (5, 4, 3, 2, 1)
    )
    assert unknown({"nvjet_tst": 80.0, "mine": 20.0}) == ""
