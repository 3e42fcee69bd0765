"""Tuned constants: what each limits, and the record under `results/bench/` it was tuned by.

None of them changes an answer. They choose between ways of computing the same numbers.
They are whole numbers: `torch.compile(dynamic=True)` makes floats inputs of the graph that reads them first, and fails
where another layer's backward reads them too.
"""

# Products of matrices (`solvers/matmul.py`)

FAST_BFLOAT16 = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities with at least fifteen times as many FLOPs in bfloat16 as in float32 (h200.json)."""

TERMS_LEAST_FLOPS = 5 * 10**8
"""Smallest product that tensor cores multiply in bfloat16 terms; launches bound smaller ones (h200.json)."""

TERMS_LONGEST_SUM = 1024
"""Most rows that tensor cores sum at once; they truncate, so longer sums come out too small (h200.json)."""

TERMS_LEAST_SPLIT_BYTES = 2**25
"""Smallest stack of terms that two products share to save memory; one product is faster (h200.json)."""

SQUARE_LEAST_FLOPS = 10**10
"""Smallest `AAᵀ` that is worth a transposed copy of A on a GPU (h200.json)."""

FP16_LEAST_SIZE = 1024
"""Fewest samples and features for which S is worth a float16 copy of A where TF32 is allowed (h200.json)."""

CPU_SQUARE_BLOCK = 128
"""Columns of a symmetric product that a CPU computes at a time (cpu.json)."""

ALIGNED = 8
"""Numbers at whose multiples rows should begin; a GPU multiplies others at a fraction of its speed (h200.json)."""

HUGE_PAGE_LEAST_BYTES = 2**25
"""Smallest result written to huge pages on a CPU; glibc returns larger arrays to Linux when freed (cpu-mlp.json)."""

# Conjugate gradients (`solvers/cg.py`, `solvers/eigenbasis.py`)

CPU_BLOCK_BYTES = 6 * 2**20
"""Bytes of all arrays together that a CPU works on at a time (cpu.json)."""

CPU_BLOCK_LEAST_OUTPUTS = 512
"""Fewest outputs in such a block; smaller blocks re-read K too often (cpu.json)."""

EIGENBASIS_COLUMNS = 1300, 5
"""Eigenvectors of `size` rows take two cores as long as a product with 1300 + 5·size columns (cpu.json)."""

TRITON_CG_MOST_SAMPLES = 2048
"""Most samples in sample space for which the Triton kernel holds whole columns in registers (h200.json)."""

TRITON_CG_MOST_ITERATIONS = 16
"""Most iterations that the Triton kernel takes in sample space: it keeps all residuals (h200.json)."""

TRITON_CG_MOST_FEATURES = 16384
"""Most features for which the Triton kernel splits a whole row of S at once (h200.json)."""

# Cholesky factors (`solvers/cholesky.py`, `solvers/block_cholesky.py`)

TRITON_CHOLESKY_MOST_ROWS = 1280
"""Largest system that the Triton kernel factorises at once; beyond it blocks are faster (h200.json)."""

CHOLESKY_BLOCK = 512
"""Most rows in a block of a blocked Cholesky factor (h200.json)."""

CHOLESKY_UNIT = 32
"""Rows in a block are a multiple of this, for tensor cores (h200.json)."""

INVERSE_BLOCK = 1024
"""Most rows of an inverse that one factorisation gives; larger ones come by blocks in products (h200.json)."""

TURNS_LEAST_FEATURES = 256
"""Fewest features of an average that is inverted in a turn of its own; launches bound smaller ones (h200.json)."""

# Solving on streams beside the backward pass (`side_streams.py`)

STREAMS = 4
"""Systems that are solved at a time (h200.json)."""

STREAMS_MOST_UNKNOWNS = 3 * 2**20
"""Largest system solved beside others; each needs a few arrays of this many numbers (h200.json)."""

PREPARED_MOST_ROWS = 1024
"""Most rows of a layer's output whose K is prepared before backward reaches it; all are held at once (h200.json)."""

# Replaying solves in eager steps (`replay.py`)

REPLAYED_AFTER = 4
"""Eager solves of the same shapes before one is captured, which takes as long as a few (h200-ways.json)."""

REPLAYS = 256
"""Solves that are kept captured on a device; the one that was not used for longest goes first (h200-ways.json)."""

REPLAYED_MOST_BYTES = 2**25
"""Most bytes of a solve's input and G; larger ones keep a GPU busy while the host launches (h200-ways.json)."""

# Convolutions (`transfer/conv.py`, `transfer/gram_*.py`)

PATCHES_MOST_NUMBERS = 2**24
"""Most numbers of unfolded patches that exist at a time while S is summed (h200.json)."""

FLOAT32_COPY_MOST_NUMBERS = 2**22
"""Most numbers of a bfloat16 input or output that exist in float32 at a time (h200-bf16.json)."""

CPU_PATCHES_MOST_NUMBERS = 2**17
"""Most numbers of patches that a CPU multiplies faster than it makes the calls of a transform (cpu.json)."""

IMAGE_ROWS_MOST_NUMBERS = 512
"""Longest image row (channels × width) for which products of rows are the fastest way to S on a GPU (h200.json)."""

IMAGE_ROWS_BLOCK_NUMBERS = 3 * 2**19
"""Most products of image rows that exist at a time, unless the input has more numbers (h200.json)."""

SHORT_TRANSFORM = 40
"""Longest Fourier transform that a CPU computes faster as a product with its matrix (cpu.json)."""

# Prices for the cost model (`solvers/plan.py`), in FLOPs of a product with K or S

OWN_PRICE_ON_A_GPU = 2
"""Price of a FLOP of a layer's own products, which do not run in terms on tensor cores (h200-spaces.json)."""

OWN_PRICE_IN_BFLOAT16 = 7
"""The same for linear layers with bfloat16 inputs, where S is one product (h200-spaces-bf16.json)."""

TRANSFORM_PRICE_ON_A_GPU = 12
"""Price of a FLOP of a Fourier transform and what goes with it (h200-spaces.json)."""

TRANSFORM_PRICE_IN_BFLOAT16 = 72
"""The same where a product takes bfloat16 numbers as they are (h200-spaces-bf16.json)."""

# Triton kernels (`kernels/`)

FP16_INNER_UNIT = 64
"""Inner dimensions of float16 products are padded to a multiple of this (h200.json)."""

FP16_WIDTH_UNIT = 16
"""Outputs in feature space are padded to a multiple of this (h200.json)."""

SPLIT_NUMBERS = 1024
"""Numbers that a program splits into bfloat16 terms (h200.json)."""

SAMPLE_CG_NUMBERS = 1024
"""Numbers of one array that a program of sample-space CG holds: 8 a thread with 4 warps (h200.json)."""

SAMPLE_CG_TRANSPOSED_NUMBERS = 8192
"""Numbers of G that a program of 8 warps transposes (h200.json)."""

SAMPLE_CG_MOST_BYTES = 2**26
"""Most bytes of residuals kept by sample-space CG; outputs come in blocks of this size (h200.json)."""

FEATURE_CG_WHOLE_ROWS = 1024
"""Most features of which a program of feature-space CG holds whole columns (h200.json)."""

FEATURE_CG_ROWS = 512
"""Rows that such a program holds at a time where there are more features (h200.json)."""

FEATURE_CG_MOST_NUMBERS = 2**23
"""Most numbers in each array of feature-space CG; outputs come in blocks of this size (h200.json)."""

FEATURE_CG_LEAST_OUTPUTS = 2048
"""Outputs that a block has even so; fewer would leave multiprocessors idle (h200.json)."""

CHOLESKY_TILE = 32
"""Rows of a tile of the Triton Cholesky kernel: one for each thread of a warp (h200.json)."""

ROTATION_COLUMNS = 16
"""Columns that a program of the rotation kernel takes: one line of memory in each row (h200.json)."""

ROTATION_WHOLE_ROWS = 1024
"""Most rows of which such a program holds whole columns (h200.json)."""

ROTATION_ROWS = 128
"""Rows that it reads at a time where there are more (h200.json)."""
