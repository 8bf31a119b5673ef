"""Networks that read images beside texts."""
