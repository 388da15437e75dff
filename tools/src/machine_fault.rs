//! Faults of the machine, such as a full disk, apart from refusals of the input. A driver of many
//! machines tries again after the first and ends after the second.

use hatchback::flash::FlashError;
use rustix::io::Errno;
use std::io::{self, ErrorKind};

/// Exit status after a fault of the machine, such as a full disk: another try, or another machine,
/// may succeed. After a refusal of the input the status is 1.
pub const STATUS: u8 = 3;

/// Returns whether the machine is the cause of an error, and not the input.
pub fn is_machine_fault(error: &anyhow::Error) -> bool {
    let fault = |cause: &(dyn std::error::Error + 'static)| {
        let of_flash = cause.downcast_ref::<FlashError>();
        if matches!(of_flash, Some(FlashError::Space { .. } | FlashError::Busy { .. })) {
            return true;
        }
        let Some(error) = cause.downcast_ref::<io::Error>() else { return false };
        let by_number = [Errno::IO, Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
        error.raw_os_error().is_some_and(|number| by_number.contains(&number))
            || matches!(
                error.kind(),
                ErrorKind::StorageFull
                    | ErrorKind::QuotaExceeded
                    | ErrorKind::OutOfMemory
                    | ErrorKind::StaleNetworkFileHandle
                    | ErrorKind::TimedOut
            )
    };
    error.chain().any(fault)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_a_fault_of_the_machine_and_a_missing_file_is_not() {
        let error = |errno: Errno| {
            let source = io::Error::from_raw_os_error(errno.raw_os_error());
            let path = "m.hatch".into();
            anyhow::Error::from(FlashError::Io { path, source }).context("table `a`")
        };
        assert!(is_machine_fault(&error(Errno::NOSPC)) && is_machine_fault(&error(Errno::IO)));
        assert!(!is_machine_fault(&error(Errno::NOENT)) && !is_machine_fault(&error(Errno::ISDIR)));
        assert!(!is_machine_fault(&anyhow::anyhow!("table `a`: key 3 occurs twice")));
    }
}
