"""Advice on a cause or a kind of work, by its place."""

from tracepage.causes import wait_words

import pytest


@pytest.mark.parametrize(
    ("name", "place", "words"),
    [
        ("allocation", "cudaFree (55 %)", "empty_cache()`: do not call it"),
        ("allocation", "hipFree, in optimizer (55 %)", "empty_cache()`: do not call it"),
        ("allocation", "cudaFree in aten::empty (55 %)", "Let shapes repeat"),
        ("allocation", "cudaFreeHost (55 %)", "Let shapes repeat"),
        ("input", "enumerate(DataLoader)#_SingleProcessDataLoaderIter", "`num_workers` is 0"),
        ("input", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter", "more `num_workers`"),
        ("launches", "9 of them (1 ms) in optimizer", "`fused=True`"),
        ("launches", "9 of them (1 ms) in optimizer beside graphs", "as graphs already"),
        ("launches", "9 of them (1 ms) in aten::copy_", "Capture the step"),
        ("unknown", "before a kernel that aten::mm had launched (9 %)", "another stream or GPU"),
        ("unknown", "the file has no events of the host", "activities of the CPU and the GPU"),
        ("attention", "cudnn_generated_fort_native_sdpa_sm90_flash (64 %)", "fused already"),
        ("matrix products", "volta_sgemm_128x64_nn (30 %)", "in bf16"),
        ("matrix products", "Cijk_Alik_Bljk_SB_MT64x16x32 (30 %)", "in bf16"),
        ("matrix products", "volta_fp16_sgemm_fp16_128x64_nn (30 %)", "perhaps FP8"),
        ("matrix products", "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn (30 %)", "perhaps FP8"),
        ("matrix products", "Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV (30 %)", "perhaps FP8"),
    ],
)
def test_the_place_decides_on_the_advice(name, place, words):
    assert words in wait_words.cure(name, place)


def test_each_cause_and_kind_has_advice():
    for name in (*wait_words.WORDS, *wait_words.WORK):
        assert wait_words.cure(name, "")
