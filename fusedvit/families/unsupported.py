"""Vision towers that take `grid_thw`, or positions of patches, and cannot be fused, each with the reason."""

UNSUPPORTED = {
    "PaddleOCRVisionModel": "takes five-dimensional pixels; its position interpolation differs between transformers "
    "5.17 and 5.23",
    "VideoLlama3VisionModel": "has a merge size per image, and resizes the merged tokens",
    "Kimi_K25VisionModel": "attends across frames, adds temporal positions and averages over time: it would take "
    "segments of whole clips, a tap more for each token's time, patches in raster order, and a kernel that averages "
    "over frames",
    "MiniMaxM3VLVisionModel": "three-axis rotary embedding of a part of each head, attention across frames",
    "MuseGlimmerVisionModel": "windows of 32 x 32 patches in raster order, zero-padded position table",
    "MuseSparkVisionModel": "windows of 32 x 32 patches in raster order, zero-padded position table",
    "Inkling2VisionModel": "a class token per image, layer scale, rotary embedding of adjacent channels",
    "HunYuanVLVisionTransformer": "no rotary embedding, learned tokens in the merger",
    "HYV4VLVisionModel": "no rotary embedding, positions resampled by a scale of their own, a learned token in the "
    "merger: it would take attention without one, patches in raster order, taps for that scale, a merger of two "
    "convolutions, and outputs with a token more behind each row of merged ones",
    "GlmImageVisionModel": "no rotary embedding",
    "Cosmos3EdgeVisionModel": "no rotary embedding, antialiased position resampling",
    "Dots3NoteVisionModel": "mixture of experts from block 25 on",
    "Lfm3VlVisionModel": "two-dimensional short convolutions in most blocks",
}
