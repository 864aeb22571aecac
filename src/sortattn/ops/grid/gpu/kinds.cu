// Kernels that march.cu and finish.cu are compiled for, by the numbers that march.py has for them.

#define RIESZ 0
#define BUMP 1
#define LAPLACE 2
