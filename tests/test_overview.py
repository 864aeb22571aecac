import csv

from sortattn.overview import kernel_table

# the columns of the paper's Table 1 after the formula, and the bandwidths of its section on bandwidth
TABLE_1 = """
softmax      inf  no         no   inf    quadratic     D^(1/4)
gauss        inf  yes        no   inf    quadratic     D^(1/4)
laplace      inf  yes        no   inf    quasi_linear  6.0
riesz        inf  partially  no   -      quadratic     1.0
add_riesz    inf  partially  yes  >=_2D  quasi_linear  1.0
add_laplace  inf  yes        yes  inf    quasi_linear  0.5
add_bump     inf  yes        yes  inf    quasi_linear  1.5
tri          2D   yes        yes  <=_2D  linear        D^(1/4)
relu         D    no         yes  <=_D   linear        1.0
elu          D    no         yes  <=_D   linear        1.0
dpfp         6D   no         no   <=_6D  linear        1.0
"""


def test_the_table_is_the_papers():
    heading, *rows = csv.reader(kernel_table("csv").splitlines())
    assert heading == ["name", "formula", "dim", "stationary", "additive", "capacity", "complexity", "bandwidth"]
    found = [[name, *(cell.replace(" ", "_") for cell in rest)] for name, _, *rest in rows]
    assert found == [line.split() for line in TABLE_1.strip().splitlines()]


def test_formulas_are_shown_in_every_style():
    assert "max(0, 1 - |s - t|)" in kernel_table("text")
    assert r"| `max(0, 1 - \|s - t\|)` " in " ".join(kernel_table("markdown").split()) + " "
