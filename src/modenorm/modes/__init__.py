"""What the modes found: record the gates, measure them, and say it in words."""

from modenorm.modes.findings import LayerReport, ModeReport
from modenorm.modes.recording import GateRecording, record_gates
from modenorm.modes.report import mode_report

__all__ = ["GateRecording", "LayerReport", "ModeReport", "mode_report", "record_gates"]
