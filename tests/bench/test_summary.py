from sortattn.bench.summary import conditions, crossovers, labels, memory_table, panels, summary, time_table


def test_the_time_table_has_softmax_first_and_ratios_beside_the_times(sweep):
    assert time_table(sweep[1:] + sweep[:1], "csv").splitlines() == [
        "N,softmax [ms],add_bump [ms],add_riesz [ms]",
        "512,1,2 (0.50x),8 (0.12x)",
        '"2,048",16,8 (2.00x),32 (0.50x)',
        '"8,192",256,32 (8.00x),512 (0.50x)',
    ]


def test_a_missing_row_leaves_its_cell_empty(sweep):
    assert time_table(sweep[:-1], "csv").splitlines()[-1] == '"8,192",256,32 (8.00x),'


def test_crossovers_are_those_of_the_rows(sweep):
    assert crossovers(sweep) == {
        "add_bump": "faster from N = 1,024",
        "add_riesz": "slower up to N = 8,192, the largest measured",
    }


def test_crossovers_use_the_softmax_of_the_same_rounds(sweep, make_row):
    # measured later on a machine twice as slow: its own softmax counts, not the row of softmax
    later = [make_row(kernel="elu", n=n, median_ms=100.0, softmax_ms=200.0) for n in (512, 2048)]
    assert crossovers(sweep + later)["elu"] == "faster at every N measured, from 512"


def test_several_backends_are_told_apart(make_row):
    rows = [make_row(backend="sorted"), make_row(backend="tiled"), make_row(kernel="softmax", backend="sdpa")]
    assert list(labels(rows).values()) == ["softmax", "add_bump (sorted)", "add_bump (tiled)"]
    ours = [make_row(kernel="softmax", backend="auto"), make_row(kernel="softmax", backend="sdpa")]
    assert list(labels(ours).values()) == ["softmax", "softmax (auto)"]


def test_memory_is_a_multiple_of_the_inputs_or_not_shown(make_row):
    rows = [make_row(n=512, memory_ratio=0.5), make_row(n=1024, memory_ratio=1.25), make_row(n=2048, memory_ratio=None)]
    assert memory_table(rows, "csv").splitlines() == ["N,add_bump", "512,0.50", '"1,024",1.25']
    assert memory_table(rows[2:]) is None


def test_panels_come_forward_first(make_row):
    rows = [make_row(passes="forward+backward"), make_row(dtype="float64"), make_row()]
    assert list(panels(rows)) == [("forward", "float32"), ("forward", "float64"), ("forward+backward", "float32")]


def test_conditions_name_shape_machine_versions_and_dates(make_row):
    text = conditions([make_row(date="2026-02-01 10:00"), make_row(date="2026-01-31 23:59", causal=True)])
    for part in ("B=1, H=2, D=8, C=8", "Some CPU, 2 threads", "torch 2.13.0", "numba 0.68.1", "Python 3.12.1"):
        assert part in text
    assert text.endswith("2026-01-31 to 2026-02-01.")
    assert ", causal" in conditions([make_row(causal=True)])
    assert "A GPU" in conditions([make_row(accelerator="A GPU")])


def test_the_summary_holds_every_table(sweep):
    text = summary(sweep)
    for part in (time_table(sweep), memory_table(sweep), "add_bump: faster from N = 1,024", conditions(sweep)):
        assert part in text
