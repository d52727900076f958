"""Vision towers that take `grid_thw` and are not fused, with what stands in the way."""

UNSUPPORTED = {
    "PaddleOCRVisionModel": "takes pixels of five axes; how it samples its positions differs between transformers 5.17 "
    "and 5.23",
    "VideoLlama3VisionModel": "merges by a size of each image's own, and resizes what it has merged",
    "Kimi_K25VisionModel": "attends to whole clips, adds positions in time and averages over it",
    "MiniMaxM3VLVisionModel": "turns three axes of a part of each head, and attends to whole clips",
    "MuseGlimmerVisionModel": "windows of 32 x 32 patches in raster order, positions padded with zeros",
    "MuseSparkVisionModel": "windows of 32 x 32 patches in raster order, positions padded with zeros",
    "Inkling2VisionModel": "a class token per image, layer scale, rotary pairs beside one another",
    "HunYuanVLVisionTransformer": "no rotary embedding, and tokens of its own in the merger",
    "GlmImageVisionModel": "no rotary embedding",
    "Cosmos3EdgeVisionModel": "no rotary embedding, positions resampled with antialiasing",
    "Dots3NoteVisionModel": "mixtures of experts from block 25 on",
    "Lfm3VlVisionModel": "two-dimensional short convolutions in most blocks",
}
