"""Images beside texts (MMBT, Kiela et al. 2019); imported only for models that read images."""
