// Kernels of clip.
