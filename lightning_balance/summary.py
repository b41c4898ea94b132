"""tmp"""


def print_summary(fit, monitor):
    print(monitor.run, monitor.run.pad_efficiency, monitor.run.cost_spread, monitor.run.tokens_per_second)
