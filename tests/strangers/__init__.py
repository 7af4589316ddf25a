"""Small programs written with other libraries under autocast, beside the half mode of the library itself and float32.

python -m tests.strangers
python -m tests.strangers --programs='gpt|lstm' --dtype=bfloat16

For each program of tests/strangers/programs, loss and gradient: the share of products (dot, conv, ragged dot) on half
operands, the relative L2 error of the gradient against float32 (loss scale 2^12, mean over seeds), conversions between
float32 and the half dtype in the program, bytes that the forward pass computes and keeps for the backward pass,
whether loss and gradients are finite, CPU seconds to trace and equations. A program that fails is named with its error
and the others go on. Prints a table and writes experiments/results/third_party_DTYPE.json.
"""
