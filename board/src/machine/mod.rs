//! The machine: every reading is optional, and a missing one says why. `linux` reads what any Linux
//! machine has. `orin` adds what a DRIVE AGX Orin has, and `sim` what a desk (a developer's
//! machine) has. `report` puts the readings together. Nothing here changes the machine; `settings`
//! does.

mod linux;
mod mounts;
mod orin;
mod reading;
mod report;
mod root;
mod sim;

pub use linux::{boot_number, hottest, watts};
pub use reading::{Reading, reading};
pub use report::Report;
pub use root::Root;
