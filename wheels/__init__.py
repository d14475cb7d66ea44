"""The wheels of a release: the package, and auraflux-kernels-cpu with its compiled CPU kernels."""
