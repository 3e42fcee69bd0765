"""Tuned constants: what each limits, and the record under `results/bench/` it was tuned by.

Those without a record say that they were not tuned. None of them changes an answer. They choose between ways of
computing the same numbers. They are integers, because `torch.compile(dynamic=True)` turns a float into an input of the
graph that reads it first, and fails when the backward of another layer reads it too.
"""

# Products of matrices (`solvers/matmul.py`)

FAST_BFLOAT16 = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities with 15 or more times as many FLOPs in bfloat16 as in float32; 9.0 was tried (h200.json)."""

TERMS_LEAST_FLOPS = 5 * 10**8
"""Fewest FLOPs of a product in bfloat16 terms; launches bound smaller products (h200.json)."""

TERMS_LONGEST_SUM = 1024
"""Most rows that tensor cores sum at once; they truncate, which makes longer sums too small (h200.json)."""

TERMS_LEAST_SPLIT_BYTES = 2**25
"""Fewest bytes of terms for which two products share them to save memory; one product is faster (h200.json)."""

SQUARE_LEAST_FLOPS = 10**10
"""Fewest FLOPs of `AAᵀ` for which a GPU first transposes A (h200.json)."""

FP16_LEAST_SIZE = 1024
"""Fewest samples, and fewest features, of an S that is formed in float16 where TF32 is allowed (h200.json)."""

CPU_ROWS_MOST_NUMBERS = 2**15
"""Most numbers of a linear layer's input whose S and `AᵀG` a CPU forms from one copy of it. Not tuned."""

CPU_SQUARE_BLOCK = 128
"""Columns of a symmetric product that a CPU computes at a time (cpu.json)."""

ALIGNED = 8
"""Rows should begin at a multiple of so many numbers; a GPU multiplies other rows slowly (h200.json)."""

HUGE_PAGE_LEAST_BYTES = 2**25
"""Fewest bytes of a result in huge pages on a CPU; glibc returns freed arrays of this size to Linux (cpu-mlp.json)."""

# Conjugate gradients (`solvers/cg.py`, `solvers/eigenbasis.py`)

CPU_BLOCK_BYTES = 6 * 2**20
"""Most bytes of the arrays that a CPU works on at a time, to save memory (ablation-cpu-blocks.json)."""

CPU_BLOCK_LEAST_OUTPUTS = 512
"""Fewest outputs that a CPU works on at a time; smaller blocks re-read K too often (cpu.json)."""

CPU_COLUMNS_MOST_NUMBERS = 2**15
"""Most numbers of a right-hand side that a CPU does not transpose. Not tuned: torch computes so few on one core."""

EIGENBASIS_COLUMNS = 1300, 5
"""Eigenvectors of a matrix take two cores as long as its product with 1300 + 5·size columns (cpu.json)."""

TRITON_CG_MOST_SAMPLES = 2048
"""Most samples for which the Triton kernel of sample-space CG holds whole columns in registers (h200.json)."""

TRITON_CG_MOST_ITERATIONS = 16
"""Most iterations of the Triton kernel of sample-space CG, which keeps all residuals (h200.json)."""

TRITON_CG_MOST_FEATURES = 16384
"""Most features for which the Triton kernel of feature-space CG splits a whole row of S at once (h200.json)."""

# Cholesky factors (`solvers/cholesky.py`, `solvers/block_cholesky.py`)

TRITON_CHOLESKY_MOST_ROWS = 1280
"""Most rows of a system that the Triton kernel factorises; for larger ones blocks are faster (h200.json)."""

CHOLESKY_BLOCK = 512
"""Most rows in a block of the blocked factorisation (h200.json)."""

CHOLESKY_UNIT = 32
"""Rows in a block are a multiple of this number, as tensor cores prefer (h200.json)."""

INVERTED_TOGETHER_MOST_BYTES = 2**28
"""Most bytes of averages that are inverted together; several copies of them are held meanwhile. Not tuned."""

TURNS_LEAST_FEATURES = 256
"""Fewest features of an average that is inverted in a turn of its own; launches bound smaller ones. Not tuned."""

# Solving on streams beside the backward pass (`side_streams.py`)

STREAMS = 4
"""Number of streams, and so of systems that are solved at a time (h200.json)."""

STREAMS_MOST_UNKNOWNS = 3 * 2**20
"""Most unknowns of a system solved on a stream; a solve holds several arrays of this many numbers (h200.json)."""

PREPARED_MOST_ROWS = 1024
"""Most rows of a layer's output for which K is prepared early; all of these K are held at once (h200.json)."""

# Replaying solves in eager steps (`replay.py`)

REPLAYED_AFTER = 4
"""Eager solves of the same shapes before one is captured; a capture takes as long as a few solves. Not tuned."""

REPLAYS = 256
"""Most captured solves kept on a device; the least recently used one is dropped first. Not tuned."""

REPLAYS_COUNTED = 4096
"""Most kinds of solves that are counted until one of them is captured; then counting starts anew. Not tuned."""

REPLAYED_MOST_BYTES = 2**25
"""Most bytes of the input and G of a captured solve; larger solves keep a GPU busy anyway (h200-ways-mlp-fp32.json)."""

# Failures (`failures.py`)

FAILURES_CHECKED_EVERY = 32
"""A GPU checks one in this many solves of a layer for a failure, starting with the first. Not tuned."""

# Convolutions (`transfer/conv.py`, `transfer/gram_*.py`)

PATCHES_MOST_NUMBERS = 2**24
"""Most numbers of unfolded patches in memory at a time while S is summed (h200.json)."""

FLOAT32_COPY_MOST_NUMBERS = 2**22
"""Most numbers of a bfloat16 input or output that are copied to float32 at a time (h200-bf16.json)."""

CPU_PATCHES_MOST_NUMBERS = 2**17
"""Most numbers of patches for which products are faster on a CPU than the calls of a transform (cpu.json)."""

IMAGE_ROWS_MOST_NUMBERS = 512
"""Longest image row (channels × width) for which products of rows are the fastest way to S on a GPU (h200.json)."""

IMAGE_ROWS_BLOCK_NUMBERS = 3 * 2**19
"""Most products of image rows in memory at a time, unless the input has more numbers (h200.json)."""

SHORT_TRANSFORM = 40
"""Longest Fourier transform that a CPU computes faster as a product with its matrix (cpu.json)."""

# Prices for the cost model (`solvers/plan.py`), in FLOPs of a product with K or S

OWN_PRICE_ON_A_GPU = 2
"""Price of a FLOP of a layer's own products, which are not split into terms for tensor cores (h200-spaces.json)."""

OWN_PRICE_IN_BFLOAT16 = 7
"""Price of a FLOP of a linear layer's own products with bfloat16 inputs (h200-spaces-bf16.json).

S is one bfloat16 product there.
"""

TRANSFORM_PRICE_ON_A_GPU = 12
"""Price of a FLOP of S by Fourier transforms (h200-spaces.json)."""

TRANSFORM_PRICE_IN_BFLOAT16 = 72
"""Price of a FLOP of S by Fourier transforms with bfloat16 inputs (h200-spaces-bf16.json).

Products take bfloat16 numbers as they are.
"""

# Triton kernels (`kernels/`)

FP16_INNER_UNIT = 64
"""Inner dimensions of float16 products are padded to a multiple of this number (h200.json)."""

FP16_WIDTH_UNIT = 16
"""Outputs in feature-space CG are padded to a multiple of this number (h200.json)."""

AVERAGED_NUMBERS = 4096
"""Numbers of a running average that a program updates. Not tuned."""

AVERAGED_LEAST_NUMBERS = 2**16
"""Fewest numbers of an average that a kernel updates in one pass; launches bound smaller ones. Not tuned."""

SYMMETRIC_SQUARE_LEAST_SIZE = 256
"""Fewest samples, and fewest features, of a 16-bit matrix whose S is formed with half of the FLOPs. Not tuned."""

SQUARE_TILE = 128
"""Rows and columns of a tile of S. Not tuned."""

SQUARE_DEPTH = 64
"""Samples that a tile of S takes at a time. Not tuned."""

SQUARE_WARPS = 8
"""Warps that share a tile of S. Not tuned."""

SQUARE_STAGES = 4
"""Samples ahead that a tile of S loads. Not tuned."""

SQUARE_MOST_PARTS = 16
"""Most parts that the samples are cut into, where S has few tiles. Not tuned."""

SQUARE_PART_ROWS = 700
"""Samples whose products take as long as writing a tile and adding it up. Not tuned."""

SQUARE_ADDED_ROWS = 32
"""Rows of a tile that a program adds up. Not tuned."""

SPLIT_NUMBERS = 1024
"""Numbers that a program splits into bfloat16 terms (h200.json)."""

SAMPLE_CG_NUMBERS = 1024
"""Numbers of an array that a program of sample-space CG holds, 8 for each thread of 4 warps (h200.json)."""

SAMPLE_CG_TRANSPOSED_NUMBERS = 8192
"""Numbers of G that a program of sample-space CG transposes with 8 warps (h200.json)."""

SAMPLE_CG_MOST_BYTES = 2**26
"""Most bytes of residuals that sample-space CG keeps; more outputs are solved for in blocks (h200.json)."""

FEATURE_CG_WHOLE_ROWS = 1024
"""Most features for which a program of feature-space CG holds whole columns (h200.json)."""

FEATURE_CG_ROWS = 512
"""Rows that a program of feature-space CG holds at a time if there are more features (h200.json)."""

FEATURE_CG_MOST_NUMBERS = 2**23
"""Most numbers in each array of feature-space CG; more outputs are solved for in blocks (h200.json)."""

FEATURE_CG_LEAST_OUTPUTS = 2048
"""Fewest outputs in a block of feature-space CG; fewer leave multiprocessors idle (h200.json)."""

CHOLESKY_TILE = 32
"""Rows of a tile of the Triton Cholesky kernel, one for each thread of a warp (h200.json)."""

ROTATION_COLUMNS = 16
"""Columns that a program of the rotation kernel takes, one line of memory in each row (h200.json)."""

ROTATION_WHOLE_ROWS = 1024
"""Most rows that a program of the rotation kernel reads all at once (h200.json)."""

ROTATION_ROWS = 128
"""Rows that a program of the rotation kernel reads at a time if there are more (h200.json)."""
